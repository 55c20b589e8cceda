"""Reports: the sites that fired, and the reasons why others did not."""
