"""What every step needs and none owns: files, child processes, units, YAML with line numbers."""
