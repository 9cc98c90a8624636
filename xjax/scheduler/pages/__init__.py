"""Rows and pages of sequences: tables, growth, prefixes that are shared, pages that wait on the host.

Who may run and who has to yield is decided elsewhere.
"""
