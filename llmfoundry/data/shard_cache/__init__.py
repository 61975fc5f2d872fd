"""Local shard cache: files of a remote data set, prefetched, verified, kept within a limit."""
