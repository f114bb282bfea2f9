"""The format of the files on disk: what a record may contain, each format defined once. Does not import torch."""
