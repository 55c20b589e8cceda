"""Say which sites would fire, and why the others would not."""
