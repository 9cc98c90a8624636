"""Host side of the cache: who owns which page. Bytes and arrays live elsewhere."""
