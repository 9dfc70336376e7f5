"""Pictures and words for people: one HTML file without network, and its Markdown twin."""
