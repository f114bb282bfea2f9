"""The contract of the files on disk: what a record may say, each form said once. Torch-free."""
