// Package cluster is a Kubernetes of one node for tests.
package cluster
