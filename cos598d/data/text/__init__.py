"""Text to integers: words, vocabulary ids, layouts of sequences, and features kept in a file."""
