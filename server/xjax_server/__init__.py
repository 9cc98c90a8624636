"""Everything of xjax that has a terminal or a socket. Never imports JAX; reaches the engine through
the lazy names of `xjax`."""
