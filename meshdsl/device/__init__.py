"""The device program: local operators and collectives, with their bytes, FLOPs and memory."""
