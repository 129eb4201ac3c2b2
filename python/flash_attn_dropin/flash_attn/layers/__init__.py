"""Layers around attention."""
