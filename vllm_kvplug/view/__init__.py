"""What a policy did to one request, as a page to look at."""
