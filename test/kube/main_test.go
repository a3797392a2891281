//go:build system

package kube_test

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// atOnce is how many parts of a test run at once: they wait more than they compute.
const atOnce = "8"

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", atOnce); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cluster.Main(m))
}
