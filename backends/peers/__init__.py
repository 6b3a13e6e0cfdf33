"""Placed programs as other systems would write them."""
