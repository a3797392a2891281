package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/loopdev"
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
	if len(mounts(" "+n.dir+" ")) > 0 {
		problems = append(problems, unix.Unmount(n.dir, unix.MNT_DETACH))
	}
	// Remove, not RemoveAll: a directory that is not empty tells of a leak.
	problems = append(problems, os.Remove(n.dir))
	return errors.Join(append(problems, n.leftovers()...)...)
}

// detachImages detaches what the driver has attached, however far it came.
func (n *node) detachImages() error {
	var problems []error
	backings, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range backings {
		raw, readErr := os.ReadFile(file) //nolint:gosec // a file of the kernel's
		if readErr == nil && strings.HasPrefix(string(raw), n.dir+"/data/") {
			problems = append(problems, loopdev.Detach("/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file)))))
		}
	}
	return errors.Join(append(problems, err)...)
}

// leftovers are what should be gone. A loop device is freed by the kernel a
// moment after the last user has closed it.
func (n *node) leftovers() []error {
	var found []error
	for range 100 {
		found = nil
		for _, line := range mounts(n.dir) {
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
	backings, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return []string{err.Error()}
	}
	var found []string
	for _, file := range backings {
		raw, err := os.ReadFile(file) //nolint:gosec // a file of the kernel's
		if err != nil {
			continue // freed in between
		}
		backing := strings.TrimSpace(string(raw))
		if (n.image != "" && strings.Contains(backing, n.image)) || (n.disk != "" && filepath.Base(backing) == filepath.Base(n.disk)) {
			found = append(found, file+": "+backing)
		}
	}
	return found
}

// mounts lists the host's mounts that hold a text.
func mounts(text string) []string {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	var found []string
	for line := range strings.SplitSeq(string(raw), "\n") {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}
