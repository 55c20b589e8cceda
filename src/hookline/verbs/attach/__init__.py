"""Raw hooks, with torch's signatures."""
