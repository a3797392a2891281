// Package kube runs crust-proxy in a real Kubernetes of one node.
package kube
