"""Shows which tokens of one request every head keeps."""
