"""Images and their classes: from files to cached pixels, and from these to a vision model's inputs."""
