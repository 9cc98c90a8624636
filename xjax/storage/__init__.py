"""Bytes of pages outside the device; which pages, and for how long, is decided elsewhere."""
