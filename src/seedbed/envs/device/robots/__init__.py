"""Robots that follow the velocity of a joystick."""
