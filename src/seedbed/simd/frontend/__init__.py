"""From the jaxpr of one example to a program."""
