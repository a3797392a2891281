//go:build system

package admission

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
)

// callersAudience is the chart's default.
const callersAudience = "snapshot-metadata.driver.crust-proxy.dev"

// TestChangedBlocksRights plays the sidecar and a backup client with the rights that the chart and its example give
// them: the client's token is valid for this service alone, and opens the snapshots of one namespace.
func TestChangedBlocksRights(t *testing.T) {
	r := start(t)
	r.defineForeignTypes(t)
	r.install(t, "--reset-values", "--values="+filepath.Join(render.Chart(), "ci/crust-driver-values.yaml"))
	r.makeNamespaces(t, "backup", "shop")
	example := filepath.Join(render.Kustomizations(t), "examples/changed-blocks")
	check.Must(t, check.Err(r.Kubectl("apply", "-f", manifest(t, render.Kustomize(t, example)))))
	sidecar, client := r.as(t, "crust-proxy", "crust-proxy-driver"), r.as(t, "backup", "backup-client")
	await(t, "the client's role", func() bool { return client.may(t, "shop", "get", "volumesnapshots") })

	user := sidecar.review(t, client.token(t, callersAudience))
	check.Require(t, user.Username == "system:serviceaccount:backup:backup-client", "with its token the client is %q", user.Username)
	other := sidecar.review(t, client.token(t))
	check.That(t, other.Username == "", "a token for the API server opens the service, to %s", other.Username)
	for namespace, want := range map[string]bool{"shop": true, "default": false} {
		check.Equal(t, sidecar.wouldAllow(t, user, namespace), want, "the client may read snapshots of %s", namespace)
	}
	for _, what := range []string{"volumesnapshotcontents", "volumegroupsnapshotcontents", "volumegroupsnapshotclasses"} {
		check.That(t, sidecar.may(t, "", "list", what), "the driver's sidecars may not list %s", what) // the snapshotter would go without
	}
	sidecar.mayNot(t, "crust-proxy", "get", "secrets", "pods", "serviceaccounts")
	sidecar.mayNot(t, "crust-proxy", "delete", "volumesnapshots", "volumesnapshotcontents")
	client.mayNot(t, "shop", "get", "secrets", "persistentvolumeclaims", "pods")
	client.mayNot(t, "backup", "get", "secrets")
	_, err := client.tokenOf(t, "default", callersAudience)
	check.That(t, apierrors.IsForbidden(err), "the client asks for a token of another account: %v", err)
}

// account is a ServiceAccount that acts with its own rights.
type account struct {
	namespace, name string
	client          kubernetes.Interface
}

func (r *rig) as(t *testing.T, namespace, name string) account {
	t.Helper()
	config := rest.CopyConfig(r.Admin)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":" + name, Groups: []string{"system:serviceaccounts", "system:authenticated"},
	}
	client := check.Value(kubernetes.NewForConfig(config))(t)
	return account{namespace, name, client}
}

// token asks for a token of the account itself, for the audiences or the API server.
func (a account) token(t *testing.T, audiences ...string) string {
	t.Helper()
	return check.Value(a.tokenOf(t, a.name, audiences...))(t)
}

// tokenOf asks for a token of an account of the same namespace.
func (a account) tokenOf(t *testing.T, name string, audiences ...string) (string, error) {
	t.Helper()
	made, err := a.client.CoreV1().ServiceAccounts(a.namespace).CreateToken(t.Context(), name,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return made.Status.Token, nil
}

// review gives whose token that is, or nobody, if it is not valid for the service.
func (a account) review(t *testing.T, token string) authenticationv1.UserInfo {
	t.Helper()
	got := check.Value(a.client.AuthenticationV1().TokenReviews().Create(t.Context(), &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{callersAudience}},
	}, metav1.CreateOptions{}))(t)
	check.That(t, got.Status.Authenticated == slices.Contains(got.Status.Audiences, callersAudience),
		"the token is valid: %v, for %q", got.Status.Authenticated, got.Status.Audiences)
	return got.Status.User
}

// wouldAllow asks, as the sidecar does, whether a caller may read the snapshots there.
func (a account) wouldAllow(t *testing.T, user authenticationv1.UserInfo, namespace string) bool {
	t.Helper()
	got := check.Value(a.client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, Groups: user.Groups, UID: user.UID,
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Verb: "get", Namespace: namespace, Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots",
			},
		},
	}, metav1.CreateOptions{}))(t)
	return got.Status.Allowed
}

func (a account) mayNot(t *testing.T, namespace, verb string, resources ...string) {
	t.Helper()
	for _, one := range resources {
		check.That(t, !a.may(t, namespace, verb, one), "%s may %s %s in %s", a.name, verb, one, namespace)
	}
}

// may asks for the account's own right.
func (a account) may(t *testing.T, namespace, verb, resource string) bool {
	t.Helper()
	group := ""
	switch {
	case strings.HasPrefix(resource, "volumesnapshot"):
		group = "snapshot.storage.k8s.io"
	case strings.HasPrefix(resource, "volumegroupsnapshot"):
		group = "groupsnapshot.storage.k8s.io"
	}
	got := check.Value(a.client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: verb, Namespace: namespace, Group: group, Resource: resource,
		}},
	}, metav1.CreateOptions{}))(t)
	return got.Status.Allowed
}
