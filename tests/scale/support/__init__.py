"""One rank of 1024 in one process: fake tensors, a process group that records, a watch on every storage."""
