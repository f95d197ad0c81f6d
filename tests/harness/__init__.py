"""What the engine tests stand on: engines, recorders, bitwise comparison, other processes."""
