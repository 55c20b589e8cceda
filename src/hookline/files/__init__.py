"""Read and write files: on a disk or at a URL, whole or not at all, with checksums."""
