"""The description of clusters: devices, links, the network between nodes, and the links that a mesh's axes use."""
