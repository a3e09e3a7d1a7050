"""From a program and its schedule to machine code for the vector unit of this CPU."""
