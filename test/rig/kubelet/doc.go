// Package kubelet has stand-ins, for tests, of the parties around crust-proxy's
// driver registry: kubelet's plugin manager, a CSI driver's node plugin, and the
// registrar that brings both together. They speak over real unix sockets, and
// keep to what the real ones were seen to do.
package kubelet
