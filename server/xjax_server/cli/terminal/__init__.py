"""What every command needs of a terminal: flags in, lines and progress out."""
