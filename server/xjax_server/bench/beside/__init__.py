"""Our server and its peers beside each other: processes, settings that peers are tried with, turns."""
