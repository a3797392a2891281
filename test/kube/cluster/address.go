//go:build system

package cluster

// NodeAddress is the node's, and that of its pods: they use the node's network.
const NodeAddress = nodeAddress
