"""Checks of text: methods against plain decoding, draws against the target, other engines' text."""
