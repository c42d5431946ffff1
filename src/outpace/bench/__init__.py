"""Measuring methods side by side: the same ids, interleaved, with the reasons."""
