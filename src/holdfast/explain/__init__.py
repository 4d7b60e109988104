"""The verdict on a text, such as a log or an error message: `holdfast explain`."""
