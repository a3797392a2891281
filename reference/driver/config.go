package driver

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// Config is the configuration of a driver.
type Config struct {
	// Endpoint is unix:///path, or the path alone.
	Endpoint string
	DataDir  string
	NodeID   string
	Name     string
	// Capacity is the number of bytes that may be reserved for volumes. With 0, a new volume
	// may be as large as the free space of the filesystem.
	Capacity int64
	// CopyLimit is how many bytes of data may be copied for a clone where the filesystem of
	// DataDir cannot share them between files. With 0 there are no clones there.
	CopyLimit int64
	// CrustProxySocket is the socket of crust-proxy's Admin API, by which volumes in sandboxes
	// are frozen. If it is empty, they are not frozen.
	CrustProxySocket string
	// FreezeLimit is how long writes to a volume may be held, in whole seconds.
	FreezeLimit time.Duration
	// Defer makes the driver native: it reports DEFER_FS_OPS.
	Defer bool
	// RegistrationSocket and KubeletEndpoint are given together, or neither.
	RegistrationSocket string
	KubeletEndpoint    string
	// MetricsListen is host:port or unix:/path, or empty.
	MetricsListen string
	Log           *zap.Logger
}

func (c Config) validate() error {
	switch {
	case !filepath.IsAbs(c.socket()):
		return fmt.Errorf("--endpoint %q: give unix:///path/of/the.sock, or its absolute path", c.Endpoint)
	case !filepath.IsAbs(c.DataDir):
		return fmt.Errorf("--data-dir %q: give an absolute path", c.DataDir)
	case c.CrustProxySocket != "" && !filepath.IsAbs(pathOf(c.CrustProxySocket)):
		return fmt.Errorf("--crust-proxy-socket %q: give unix:///path/of/the.sock, or its absolute path", c.CrustProxySocket)
	case c.NodeID == "" || c.Name == "":
		return errors.New("--node-id and --driver-name must not be empty")
	case c.Capacity < 0 || c.CopyLimit < 0:
		return errors.New("--capacity and --copy-limit must not be negative")
	case c.FreezeLimit < time.Second || c.FreezeLimit > fsops.MostFrozen || c.FreezeLimit%time.Second != 0:
		return fmt.Errorf("--freeze-limit: give whole seconds, from 1s to %v", fsops.MostFrozen)
	case (c.RegistrationSocket == "") != (c.KubeletEndpoint == ""):
		return errors.New("--kubelet-registration-socket and --kubelet-endpoint go together")
	case c.Log == nil:
		return errors.New("no logger is given")
	}
	return nil
}

func (c Config) socket() string { return pathOf(c.Endpoint) }

// pathOf returns the path of a socket, which is given as a path or as unix:///path.
func pathOf(socket string) string { return strings.TrimPrefix(socket, "unix://") }
