//go:build system

// Package kube_test runs crust-proxy in a real Kubernetes of one node.
package kube_test

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }
