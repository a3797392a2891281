package blocks

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
)

// The paths of the API groups that are used.
const (
	coreGroup     = "/api/v1"
	snapshotGroup = "/apis/snapshot.storage.k8s.io/v1"
	metadataGroup = "/apis/cbt.storage.k8s.io/v1beta1"
)

const (
	// apiTime bounds one answer of the API server.
	apiTime = 30 * time.Second
	// tokenTime is the shortest lifetime that the API server allows. The token of a stream is
	// checked only when it starts.
	tokenTime = 10 * time.Minute
)

// Cluster finds the service for the blocks of a snapshot, by the Kubernetes API.
type Cluster struct {
	// Namespace is the namespace of the snapshots.
	Namespace string

	client *rest.RESTClient
	own    []string // the audiences of the API server, once they are known
}

// OpenCluster reads a kubeconfig as kubectl does: if no path is given, from KUBECONFIG and the home
// directory, and otherwise from the pod that it runs in. If namespace is empty, it is that of the context.
func OpenCluster(kubeconfig, kubeContext, namespace string) (*Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	overrides := &clientcmd.ConfigOverrides{CurrentContext: kubeContext}
	overrides.Context.Namespace = namespace
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
	config, err := loader.ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("there is no kubeconfig: give --kubeconfig or set KUBECONFIG, or name the driver's socket by --csi-socket")
	}
	if err != nil {
		return nil, fmt.Errorf("the kubeconfig cannot be used: %w", err)
	}
	c := &Cluster{}
	if c.Namespace, _, err = loader.Namespace(); err != nil {
		return nil, fmt.Errorf("the kubeconfig cannot be used: %w", err)
	}
	config.UserAgent = "crust-backup"
	c.client, err = apiserver.Plain(config)
	return c, err
}

// Snapshot is a VolumeSnapshot that is ready.
type Snapshot struct {
	Driver string
	// ID is CSI's.
	ID string
}

// Snapshot finds one by its name.
func (c *Cluster) Snapshot(ctx context.Context, name string) (*Snapshot, error) {
	var snapshot struct {
		Status struct {
			Content string `json:"boundVolumeSnapshotContentName"`
			Ready   bool   `json:"readyToUse"`
		} `json:"status"`
	}
	if err := c.get(ctx, snapshotGroup, "volumesnapshots", c.Namespace, name, &snapshot); err != nil {
		return nil, fmt.Errorf("VolumeSnapshot %s/%s: %w", c.Namespace, name, err)
	}
	if !snapshot.Status.Ready || snapshot.Status.Content == "" {
		return nil, notReady(c.Namespace, name)
	}
	var content struct {
		Spec struct {
			Driver string `json:"driver"`
		} `json:"spec"`
		Status struct {
			Handle string `json:"snapshotHandle"`
		} `json:"status"`
	}
	if err := c.get(ctx, snapshotGroup, "volumesnapshotcontents", "", snapshot.Status.Content, &content); err != nil {
		return nil, fmt.Errorf("VolumeSnapshotContent %s: %w", snapshot.Status.Content, err)
	}
	if content.Status.Handle == "" {
		return nil, notReady(c.Namespace, name)
	}
	return &Snapshot{Driver: content.Spec.Driver, ID: content.Status.Handle}, nil
}

// Base finds the CSI id of the base of a target, by its name.
func (c *Cluster) Base(ctx context.Context, name string, target *Snapshot) (id string, err error) {
	base, err := c.Snapshot(ctx, name)
	if err != nil {
		return "", err
	}
	if base.Driver != target.Driver {
		return "", otherDriver(c.Namespace, name, base.Driver, target.Driver)
	}
	return base.ID, nil
}

// Unchanged wraps a source that names the snapshot by its name. When a stream has brought its first message, or ends
// without one, the server has looked up the name: only then is it certain that it found the same snapshot. After an
// error, too: a snapshot that is gone does not come back by trying.
func (c *Cluster) Unchanged(s *Snapshot, name string, source Source) Source {
	return func(ctx context.Context, from int64) (Stream, error) {
		stream, err := source(ctx, from)
		checked := false
		return func() (Message, error) {
			m, end := stream()
			if checked {
				return m, end
			}
			checked = true
			now, err := c.Snapshot(ctx, name)
			if err == nil && *now != *s {
				err = replaced(c.Namespace, name, s.ID, now.ID)
			}
			return m, cmp.Or(err, end)
		}, err
	}
}

// Service is a SnapshotMetadataService object, which describes a driver's sidecar.
type Service struct {
	Audience string `json:"audience"`
	Address  string `json:"address"`
	CA       []byte `json:"caCert"`
}

// Service finds the sidecar of a driver.
func (c *Cluster) Service(ctx context.Context, driver string) (*Service, error) {
	var object struct {
		Spec Service `json:"spec"`
	}
	if err := c.get(ctx, metadataGroup, "snapshotmetadataservices", "", driver, &object); err != nil {
		return nil, fmt.Errorf("SnapshotMetadataService %s: %w", driver, err)
	}
	return &object.Spec, nil
}

// Token requests a token of a service account for the audience of a service. It refuses one
// that the API server accepts too, or may accept: with it the service could do whatever the account may.
func (c *Cluster) Token(ctx context.Context, namespace, account, audience string) (string, error) {
	if c.own == nil {
		given, err := c.requestToken(ctx, namespace, account) // without an audience it is for the API server
		if err != nil {
			return "", err
		}
		c.own = given.Spec.Audiences
	}
	made, err := c.requestToken(ctx, namespace, account, audience)
	if err != nil {
		return "", err
	}
	if len(c.own) == 0 || len(made.Spec.Audiences) == 0 {
		return "", unknownAudience(audience)
	}
	if slices.ContainsFunc(made.Spec.Audiences, func(one string) bool { return slices.Contains(c.own, one) }) {
		return "", apiAudience(namespace, account, audience)
	}
	return made.Status.Token, nil
}

func (c *Cluster) requestToken(ctx context.Context, namespace, account string, audiences ...string) (made authenticationv1.TokenRequest, err error) {
	seconds := int64(tokenTime.Seconds())
	body, err := json.Marshal(authenticationv1.TokenRequest{
		TypeMeta: metav1.TypeMeta{APIVersion: authenticationv1.SchemeGroupVersion.String(), Kind: "TokenRequest"},
		Spec:     authenticationv1.TokenRequestSpec{Audiences: audiences, ExpirationSeconds: &seconds},
	})
	if err != nil {
		return made, err
	}
	ctx, cancel := context.WithTimeout(ctx, apiTime)
	defer cancel()
	err = decode(c.client.Post().AbsPath(coreGroup).Namespace(namespace).Resource("serviceaccounts").Name(account).SubResource("token").
		SetHeader("Content-Type", runtime.ContentTypeJSON).Body(body).Do(ctx), &made)
	if err != nil {
		err = fmt.Errorf("a token of service account %s/%s: %w", namespace, account, err)
	}
	return made, err
}

// get gets one object. namespace is "" for an object that has none.
func (c *Cluster) get(ctx context.Context, group, resource, namespace, name string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, apiTime)
	defer cancel()
	return decode(c.client.Get().AbsPath(group).NamespaceIfScoped(namespace, namespace != "").Resource(resource).Name(name).
		SetHeader("Accept", runtime.ContentTypeJSON).Do(ctx), into)
}

func decode(answer rest.Result, into any) error {
	if err := answer.Error(); err != nil {
		return err
	}
	raw, err := answer.Raw()
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, into)
}
