//go:build system

package node

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// insideEnv is set where this program runs in the machine.
const insideEnv = "CRUST_TEST_INSIDE"

// inside are the tests that run in the machine.
var inside = []testing.InternalTest{
	{Name: "ext4", F: podOn}, {Name: "xfs", F: podOn}, {Name: "btrfs", F: podOn},
	{Name: "outlives", F: outlives}, {Name: "starts", F: startsToLast}, {Name: "lasts", F: lasts},
	{Name: "disks", F: worksOnDisks}, {Name: "images", F: func(t *testing.T) { prepare(t, "") }},
}

func TestMain(m *testing.M) {
	if os.Getenv(insideEnv) == "" {
		os.Exit(rig.Main(m))
	}
	testing.Main(func(pattern, name string) (bool, error) { return pattern == name, nil }, inside, nil, nil)
}
