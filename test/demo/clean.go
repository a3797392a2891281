package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// cleanUp takes everything away, looks whether that is so, and says it.
func cleanUp(n *node) error {
	err := n.close()
	if err != nil {
		fmt.Printf("%s✗%s Not everything could be cleaned up: %v\n", red, plain, err)
		return err
	}
	fmt.Printf("%s✓%s Cleaned up: no mount, loop device, socket or file is left.\n", green, plain)
	return nil
}

// close takes everything away, whatever happened, and proves it.
func (n *node) close() error {
	var problems []error
	for _, s := range n.sandboxes {
		problems = append(problems, s.end())
	}
	n.kill()
	if n.driver != nil {
		_ = n.driver.Process.Kill()
		_ = n.driver.Wait()
	}
	if n.conn != nil {
		_ = n.conn.Close()
	}
	problems = append(problems, n.detachImages()) // where the demo was stopped before the driver let go
	if len(rig.MountLines(" "+n.dir+" ")) > 0 {
		problems = append(problems, unix.Unmount(n.dir, unix.MNT_DETACH))
	}
	// Remove, not RemoveAll: a directory that is not empty tells of a leak.
	problems = append(problems, os.Remove(n.dir))
	return errors.Join(append(problems, n.leftovers()...)...)
}

// detachImages detaches what the driver has attached, however far it came.
func (n *node) detachImages() error {
	var problems []error
	for device := range rig.Loops(n.dir + "/data/") {
		problems = append(problems, loopdev.Detach(device))
	}
	return errors.Join(problems...)
}

// leftovers are what should be gone. A loop device is freed by the kernel a
// moment after the last user has closed it.
func (n *node) leftovers() []error {
	var found []error
	for range 100 {
		found = nil
		for _, line := range rig.MountLines(n.dir) {
			found = append(found, errors.New("mount left: "+line))
		}
		for _, loop := range n.loops() {
			found = append(found, errors.New("loop device left: "+loop))
		}
		if len(found) == 0 {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return found
}

// loops lists the loop devices over our image, which the kernel names from its
// filesystem's root once that is unmounted, and those over our disk.
func (n *node) loops() []string {
	var found []string
	for device, backing := range rig.Loops("") {
		if (n.image != "" && strings.Contains(backing, n.image)) || (n.disk != "" && filepath.Base(backing) == filepath.Base(n.disk)) {
			found = append(found, device+": "+backing)
		}
	}
	return found
}
