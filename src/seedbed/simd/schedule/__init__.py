"""What of a program runs where: live operations, their loops, fusion, guards, order, and what they cost."""
