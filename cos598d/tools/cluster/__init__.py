"""Several hosts emulated on one Linux machine: network namespaces, a switch, and links with rate and delay."""
