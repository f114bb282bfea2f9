"""Text to integers: words, vocabulary ids, layouts of sequences, and cached features."""
