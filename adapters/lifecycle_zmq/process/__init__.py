"""One engine process, link or no link: started, watched, and reaped."""
