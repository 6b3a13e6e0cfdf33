"""What a device program is written as, and the engines that run it."""
