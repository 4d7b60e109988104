"""How a batch gets from a worker to the consumer: shared memory, and what is written there."""
