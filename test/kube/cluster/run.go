//go:build system

package cluster

import (
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// RunWith gives a cluster to who is no test, in a process that has a mount and a
// network namespace of its own; Build comes before those. Ours are the programs of
// this project by name: crust-proxy, crust-driver, crust-runc with crust-runc-agent
// beside it.
func RunWith(ours map[string]string, logLevel string, do func(*Cluster) error) (err error) {
	if err := rig.MakeMountsPrivate(); err != nil {
		return err
	}
	undo, err := prepare()
	defer func() { err = errors.Join(err, undo()) }()
	if err != nil {
		return err
	}
	c, err := open(ours, logLevel)
	if c == nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, c.Logs())
	}
	return do(c)
}
