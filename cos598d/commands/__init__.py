"""What a user types, one file a command, with the flags that commands share."""
