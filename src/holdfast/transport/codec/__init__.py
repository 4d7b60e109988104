"""A batch as bytes: pickle for its structure, the arena for its tensors and arrays.

`encode` walks the batch with a pickler that takes tensors, storages, arrays and protocol-5 buffers
out of the stream, as spans of raw memory. Each span then finds its place:

* it already lies in an arena block (default collation put it there): nothing is copied;
* it is small: into the frame itself, or, if the small ones add up, into a common block;
* else: one copy, into a block of its own. One block for the whole batch would be simpler, but
  then a user who keeps the labels would keep the images with them;
* no arena, or no room in it: into the frame, whatever its size.

A `Parcel` is a frame in the main process, with a lease on each of its blocks, so that nothing can
recycle them; `Parcel.unpack` rebuilds the batch on the leases without a copy.

Tensors that share a storage share one afterwards too, if their spans fill at least half of the
range from the first to the last. So two rows of a huge dataset do not take the rest of it along.
Arrays come out independent of each other, as with pickle, and so do tensors whose storages merely
overlap.

A frame: header | table (marshal) | pickle | small spans | large spans.
"""

from holdfast.transport.codec.decoding import Parcel, decode
from holdfast.transport.codec.encoding import encode, encode_for_start
from holdfast.transport.codec.frame import SMALL

__all__ = ["SMALL", "Parcel", "decode", "encode", "encode_for_start"]
