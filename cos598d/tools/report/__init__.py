"""Pages and tables of records: runs and benches, from their files alone. Does not import torch."""
