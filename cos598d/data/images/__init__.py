"""Images and their classes: from files to pixels in a cache, and from these to what a vision model reads."""
