// Package apiserver is how and as whom the API server of Kubernetes is asked, and what its errors mean.
package apiserver

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"syscall"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Identity is how and as whom the API server is asked.
type Identity struct {
	// Kubeconfig is the path of a file, such as kubelet's own.
	Kubeconfig string
	// InCluster uses the service account of the pod that we run in.
	InCluster bool
	// UserAgent is what the API server logs.
	UserAgent string
}

// Config reads the identity. client-go itself reads certificates, keys and tokens again when their files change.
func (i Identity) Config() (*rest.Config, error) {
	config, err := i.read()
	if err != nil {
		return nil, err
	}
	config.UserAgent = i.UserAgent
	config.WarningHandler = rest.NoWarnings{}
	config.QPS = -1 // the callers bound how many requests they make at a time
	return config, nil
}

func (i Identity) read() (*rest.Config, error) {
	if i.InCluster {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("the service account of this pod cannot be read: %w", err)
		}
		return config, nil
	}
	if err := safe(i.Kubeconfig); err != nil {
		return nil, err
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: i.Kubeconfig}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("the kubeconfig %s cannot be used: %w", i.Kubeconfig, err)
	}
	return config, nil
}

// safe refuses a kubeconfig that others could change: it may name a credential program, which we would run.
func safe(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the kubeconfig %s does not exist (yet)", path)
	case err != nil:
		return fmt.Errorf("the kubeconfig cannot be read: %w", err)
	case !info.Mode().IsRegular():
		return fmt.Errorf("the kubeconfig %s is not a regular file", path)
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if ok && owner.Uid != 0 && int(owner.Uid) != os.Geteuid() {
		return fmt.Errorf("the kubeconfig %s belongs to user %d: it must be root's", path, owner.Uid)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("the kubeconfig %s can be written by others than its owner (mode %#o): chmod go-w %s", path,
			info.Mode().Perm(), path)
	}
	return nil
}

// Stamp is a hash of the kubeconfig, or zero if it cannot be read.
func (i Identity) Stamp() [sha256.Size]byte {
	raw, err := os.ReadFile(i.Kubeconfig)
	if err != nil {
		return [sha256.Size]byte{}
	}
	return sha256.Sum256(raw)
}

// NodeName is the name that kubelet gives this node unless it is configured otherwise.
func NodeName() (string, error) {
	name, err := os.Hostname()
	name = strings.ToLower(strings.TrimSpace(name))
	if err != nil || name == "" {
		return "", volume.Errorf(volume.Internal, "the node's name cannot be told from its host name (%q): set "+
			"cluster.nodeName: %w", name, err)
	}
	return name, nil
}

// Plain returns a client that knows only the API server's errors: objects are plain JSON. It follows no
// redirect, which would take the caller's credentials to where a proxied pod wants them.
func Plain(config *rest.Config) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.GroupVersion = &schema.GroupVersion{Version: "v1"}
	config.WarningHandler = rest.NoWarnings{}
	client, err := rest.UnversionedRESTClientFor(config)
	if err == nil { // its own, which may be http.DefaultClient, stays as it is
		last := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		client.Client = &http.Client{Transport: client.Client.Transport, Timeout: client.Client.Timeout, CheckRedirect: last}
	}
	return client, err
}
