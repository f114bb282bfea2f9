"""Several hosts emulated on one Linux machine: network namespaces, a switch, and links of a rate and a delay."""
